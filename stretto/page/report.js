const natural=(a,b)=>{  // numbers before texts; in texts, numbers by their size: convs.2 before convs.10
 if(typeof a!==typeof b)return typeof a==='number'?-1:1;
 if(typeof a==='number')return a-b||0;  // of two that are infinite: equal
 const p=a.split(/(\d+)/),q=b.split(/(\d+)/);
 for(let i=0;i<Math.min(p.length,q.length);i++)if(p[i]!==q[i])return i%2&&p[i]-q[i]||(p[i]<q[i]?-1:1);
 return p.length-q.length;
};
document.querySelectorAll('table[data-sort]').forEach(table=>{
 const body=table.tBodies[0];
 table.querySelectorAll('th').forEach((head,column)=>{
  const sort=()=>{
   const down=head.getAttribute('aria-sort')!=='descending';
   table.querySelectorAll('th').forEach(h=>h.removeAttribute('aria-sort'));
   head.setAttribute('aria-sort',down?'descending':'ascending');
   const value=row=>{const cell=row.cells[column];const n=cell.dataset.value;return n===undefined?cell.textContent:parseFloat(n)};
   const rows=[...body.rows],empty=row=>value(row)==='';  // cells without a value come last, both ways
   const kept=rows.filter(row=>!empty(row)).sort((a,b)=>natural(value(a),value(b))*(down?-1:1));
   body.append(...kept,...rows.filter(empty));
  };
  const button=document.createElement('button');  // its Enter and Space are clicks
  button.type='button';button.append(...head.childNodes);head.append(button);head.addEventListener('click',sort);
 });
});
document.querySelectorAll('input[data-for]').forEach(input=>input.addEventListener('input',()=>{
 const words=input.value.toLowerCase().split(/\s+/);
 for(const row of document.getElementById(input.dataset.for).tBodies[0].rows){const text=row.textContent.toLowerCase();row.hidden=!words.every(w=>text.includes(w))}
}));
